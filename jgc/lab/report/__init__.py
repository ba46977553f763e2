"""Reports on finished runs, and the commands that train runs for a report: report, compare, sweep."""
