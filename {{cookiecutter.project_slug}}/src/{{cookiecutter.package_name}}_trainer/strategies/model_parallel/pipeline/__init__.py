"""Pipeline parallelism: the children of ``sequential_module`` divided over processes."""
