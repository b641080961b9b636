"""Programs with races, their corrected twins, and tests of race detection."""
