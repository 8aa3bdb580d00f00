"""What is wrong with log-probs that another system recorded, if anything.

`readers` reads what vLLM, SGLang, verl, TRL and tunix write; `rollouts` has the values and their
checks. `evidence` is one forward over all tokens, `explanations`, `ends` and `variants` are what
may be wrong, `noise` is the likelihood by which they are compared, and `verdict` says which one it
is.
`report` is for people; `monitor` gives a trainer metrics and corrections of two arrays.
"""
