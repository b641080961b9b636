"""What runs in each process of a simulated machine: overrides of torch's kernels, compiled code, and rehearsals.

torch loads it through `entry_point`, by file name, with a Python that may lack this package. So it imports torch and, of this
package, only `_settings` and what compiles and finds the engine of ops.
"""
