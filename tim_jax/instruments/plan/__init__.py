"""A plan for a pod: a run's programs compiled for a TPU slice that is not here."""
