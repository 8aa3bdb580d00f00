"""A dense decoder: what it computes, its weights and checkpoints, and the one forward."""
