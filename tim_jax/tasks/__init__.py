"""Tasks: prompts with verifiable answers, and the rewards for completions."""
