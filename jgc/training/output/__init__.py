"""What a run prints, draws and writes."""
