"""Implementation of the pytest plug-in. Its modules, except `keys`, are imported only if an option or mark uses them."""
