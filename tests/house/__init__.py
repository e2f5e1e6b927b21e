"""The rules of the house, checked by `make check`: plain words, small rooms, nothing written twice, tests that keep out
of private names.

Knows the source of `ravnest/`, `docs/` and the README as text and syntax trees; imports nothing of Ravnest.
"""
