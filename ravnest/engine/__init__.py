"""Engine: one stage at work, from the microbatches that arrive to the results that it sends on.

May know the graph, the settings, the errors and the marks of microbatches. Knows nothing of the network, of other
stages or of the coordinator. Its modules and rooms, from the top:

    worker          the thread that owns torch, and the loop that picks the next task
    stage_tasks     one task: forward, backward, update or evaluation of a microbatch
    inbox/          microbatches that have arrived, checked and joined
    messages        what goes into and out of a worker
    telemetry/      spans, counters, busy time and activity
    speed/          how fast a device computes, measured or simulated
    stage           one stage: forward, backward, update, and its whole state
    passes/         forward and backward passes under a version policy
    settings        how a stage trains, as plain data
    corrections/    corrections of staleness, one file each
    finite_checks/  values that are not finite: refused, and traced to their origin
    weights/        weight versions, gradient sums, model states, optimizer moments
    schedule        which task comes next
    out_of_memory   errors that mean that memory ran out
"""
