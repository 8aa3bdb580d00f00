"""What is wrong with log-probs that another system recorded, if anything.

`readers` reads what vLLM, SGLang, verl, TRL and tunix write, `aliases` plain lines by other names;
`rows` has the values and their checks, `declared` the options that shape the draws, and `rollouts`
collects them. `evidence` is one forward over all tokens, with `shaping` of their logits;
`explanations`, `ends`, `parts` and `variants` are what may be wrong; `noise` is the likelihood by
which they are `judged`, and `verdict` says which one it is.
`report` is for people; `monitor` gives a trainer metrics and corrections of two arrays.
"""
