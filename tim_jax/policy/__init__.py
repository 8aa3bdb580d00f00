"""From weights to tokens and their log-probs: the distribution, the sampler, and scoring."""
