"""The campaign: the six notebooks in order, their states, one server, a report after every phase."""
