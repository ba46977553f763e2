"""Reports over many runs, and runs for a report: `python -m jgc report`, `python -m jgc compare`."""
