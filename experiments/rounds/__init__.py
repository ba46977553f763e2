"""Rounds through a bucket on slow links: utilisation, validation loss, bytes and requests.

From below: `cells` are the settings of a run and its line of results, `training` the model and its
data, `record` a node's notes on its rounds, `trace` its requests; `node_bucket`, `node_gloo` and
`node_torch` are a node's process; `links` are namespaces, server and delay; `measure` runs a cell,
`figures` evaluates it; `overlap` and `newcomer` are experiments with a table each; `tables`, `plot`
and `page` show all, and `command` is the command line.
"""
