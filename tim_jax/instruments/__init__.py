"""What looks at a policy from outside: audit, diagnosis, plan of a run, studies."""
