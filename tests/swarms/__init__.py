"""Swarms for tests, at three levels. Take the first level that can break the promise under test.

| level | coordinator | providers | network | one run takes | module |
|---|---|---|---|---|---|
| scripted | real | a few lines each, on the same event loop | none | 0.2 s | `scripted` |
| in-process | real | real clients in this process | loopback, mutual TLS | 0.1 s | `in_process` |
| processes | real | `ravnest join`, a process each | loopback, mutual TLS | 1 s to 30 s | `embedded`, `machines` |

**Scripted** (`Run`, fixture `play`) is for decisions of the coordinator: who takes which stage, what is fed again, from
which state a stage begins. The scripted providers check that no microbatch is lost, repeated or out of order. All
durations are drawn from a seed, so a failure can be repeated.

**In-process** (`LocalSwarm`) is for what passes over the wire and who may say it: joins, certificates, streams,
uploads, floods. No model is trained.

**Processes** is for what only a process can show: training to the right weights, signals, the command line, exit codes.
`swarm` (fixture, `embedded.SharedSwarm`) trains one job after another in the same four providers: use it unless a test
kills a provider. `SharedSwarm(n)` has providers to spare, and is replaced once too many were killed; `impostor` starts
another program in place of a provider; `machines.Swarm` (fixture `machines` of tests/e2e_swarm) starts `ravnest serve`
and `ravnest join`. The labs of tests/wan and tests/chaos start the same commands in network namespaces.

Tests of one part without a coordinator have builders next to them: rings in tests/averaging and tests/provider/rings,
stages in tests/provider/stage, streams and certificates in tests/net.
"""
