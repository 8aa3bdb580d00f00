"""What a run reads, writes and shows."""
