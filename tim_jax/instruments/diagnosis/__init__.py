"""What is wrong with log-probs that another system recorded, if anything.

`readers` reads what vLLM, SGLang, verl, TRL, tunix and scripts write; `rollouts` checks the rows
and collects them as responses, and `declared` has the options that shape the draws. `evidence` is
one forward over all tokens. `explanations`, `parts` and `variants` are what may be wrong, with the
likelihood by which they are compared; `verdict` says which one it is, and `records` writes it down.
`monitor` gives a trainer metrics and corrections of two arrays.
"""
