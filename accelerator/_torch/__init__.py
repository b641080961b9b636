"""What runtime functions share: the runtime state, torch's private bindings, and what torch lacks."""
