"""Rounds over an object store: nodes that come and go, with nothing but a bucket between them.

`bucket` and `names` say what lies where, `arithmetic` what all nodes compute alike, `protocol` has
the rules, `closing`, `replay` and `opening` their parts as generators of `requests`.
"""
