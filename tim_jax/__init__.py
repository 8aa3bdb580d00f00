"""Training-inference mismatch in RL for language models: removed, injected, corrected, shown."""
