"""A ThreadSanitizer run of NCCL and the runtime: no tests of pytest's, because it needs a build of its own and minutes."""
