"""Time and bytes of every method between real processes on hosts of one machine, over links of a given rate.

From below: `namespaces` are the hosts and their cables, `workers` the processes on them, `channel` their link to the
parent, `worker_jax` and `worker_torch` what they do; `rounds` takes the steps of a `plan`, `results` keeps them,
`figures`, `tables` and `plot` show them; `command` is the command line.
"""
