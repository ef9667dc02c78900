"""A real SGLang server, and its HiCache stack in one process, on a machine without a GPU."""
