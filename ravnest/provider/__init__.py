"""The lending side: measures its machine, joins a coordinator and hosts one stage."""
