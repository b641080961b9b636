"""What the actions stand on: torch's private bindings, and what torch lacks."""
