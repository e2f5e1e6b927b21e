"""Deploy: how a plan gets onto its providers, in a first deployment, a rebuild of one cluster, or a redeployment.

Knows the plan, the replicas and the rounds of averaging. Does not decide when to rebuild or redeploy: `recovery` does.
May import `averaging`, `replicas` and below.
"""
