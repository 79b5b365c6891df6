"""From a call of the model to compiled code without asking Dynamo: what may have changed is looked at, and nothing else.

describe    a value as text that is the same in every process
versions    which of many dicts were written to since we last looked
watch       whether a model is still the one that was compiled
trace       Dynamo's capture of a whole call: guards, byte code, graph
product     a compiled graph with what surrounds it, to and from bytes
entry       one compiled call: when it may be used, and how it runs
disk        entries on disk, by key
dispatcher  the entries of one model, and what happens when none fits
"""
