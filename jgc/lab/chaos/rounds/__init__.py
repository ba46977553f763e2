"""Faults against one long run of rounds: nodes as processes of this machine, a folder or SeaweedFS as their bucket.

From below: `node` is a process, `links` what is between it and the bucket, `accounts` what it has moved; `nodes` starts
and ends processes, `audit` reads the bucket as one more node, `faults` has the faults; `campaign` begins one after
another, `page` makes the table.
"""
