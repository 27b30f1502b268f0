"""What runs on ranks and measures one thing: the probes of the suite, for checks of one's own. Most need torch."""
