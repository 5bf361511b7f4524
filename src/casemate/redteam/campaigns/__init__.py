"""Red-team campaigns: `plan -> prepare -> execute -> audit -> judge -> write` (see `pipeline`).

| module | contents |
|---|---|
| `pipeline` | `Campaign`: the stages, shared by all campaigns |
| `membership`, `extraction` | `AttackRunner`s: execute, audit and judge one kind of attack |
| `own`, `external` | the campaigns: prepare the system of this configuration, or external targets |
| `external_targets`, `liveness_checks` | resolve external targets; check that they answer from their collection |
| `workers` | the targets on the workers of a cluster |
"""
