"""python -m cupyfused bench: the operator beside its peers on this machine, as tables, JSON and pictures.

`cases` says what is measured, `peers` who takes part, `values` who may be timed, `timing` how; `sections` puts these together,
`run` is the command, and `report` and `pictures` show its results. Nothing here is imported by `import cupyfused`.
"""
