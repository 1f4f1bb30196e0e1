"""A local catalog of kernels: what there is, what it runs on, who measured it, and under which terms it may be used."""
