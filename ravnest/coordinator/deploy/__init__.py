"""Deploy: puts a plan on its providers: the first deployment, the rebuild of a cluster, and redeployments.

Knows the plan, the replicas and the rounds of averaging. Does not decide when to rebuild or redeploy: `recovery` does.
May import `averaging`, `replicas` and below.
"""
