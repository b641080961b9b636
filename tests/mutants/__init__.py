"""Small deliberate faults, each with the tests that must notice it."""
