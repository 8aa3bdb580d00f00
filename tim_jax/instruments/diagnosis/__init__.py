"""What is wrong with log-probs that another system recorded, if anything.

`rows` are as files hold them; `readers` makes rows of what vLLM, SGLang, verl, TRL, tunix and
scripts write; `rollouts` checks them and collects them as responses, and `declared` has the options
that shape the draws. `evidence` is one forward over all tokens. `reporting`, `parts` and
`variants` are what may be wrong, compared by the likelihood of `explanations`; `verdict` says
which one it is, and `records` writes it down. `reporting` also looks at episodes of several turns.
"""
