"""Preview: what `ravnest plan` reads and shows.

Plans with the same rules as a run (`coordinator/plan`) and starts nothing. Only `cli` may import it.
"""
