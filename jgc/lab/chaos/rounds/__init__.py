"""Faults against one long run of rounds: nodes as processes of this machine, a folder or SeaweedFS
as their bucket.

From below: `links` are faults between a node and its bucket, `accounts` what a node has moved, and
`node` is its process; `nodes` starts and ends processes, `audit` reads the bucket, `faults` has the
faults; `run` is a run with faults under way, `campaign` begins one by one, `page` makes the
page.
"""
