"""The markers of this plugin, as `pytest --markers` shows them."""

MARKERS = (
    "spmd: run the body of this test on every rank; its argument `rank` says which one it is",
    "world_size(n): run this test on n ranks only; skipped where there are fewer",
    "level(name): run this test at this level and above only (quick, standard, burnin)",
    "fresh_world: start new rank processes for this test",
    "at_the_end: run this test after all others, whatever order was asked for",
    "host_alone: nodes of a run that are one host, and runs beside each other on it, run this test one after the other",
    "needs(ranks=, capability=, gpus=, nodes=): where there are fewer ranks, a GPU of a lower compute capability, no "
    "GPUs but CPU ranks, or fewer nodes, this test does not apply",
    "figures(metric, ..., of_several=(), required=(), of='', peers=''): what this test is there for; one of the suite "
    "that passed without them is not done. `of_several`: those that take several GPUs. How they are judged, in words "
    "for docs/checks.md: a limit for one of `required` must be there, `of` which of its figures; which are held "
    "against those of the `peers`, '' for all, None for none",
    "chapter(title, question): where this test of the suite stands in the report",
    "proves_sound: a machine of which no test with this mark ran is not known to be good",
)
