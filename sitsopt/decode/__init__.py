"""Decoding: a loop over compiled graphs of few fixed sizes, and speculation on top of it.

sizes       which sizes of a call are compiled
fitting     what the loop has to know of a model and its cache
runner      a compiled model with its cache: rows in, logits out, rows taken back
picker      logits to tokens, as transformers does it
loop        tokens one after the other, or block by block
drafts      what proposes tokens: the text so far, layers of the model, another model
pace        how many tokens to propose, and when not to
generating  the loop behind `model.generate()`
"""
