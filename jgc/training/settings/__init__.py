"""The settings of a run: configuration, workloads and the command line."""
