"""The relay: at the server between Flower's Grid and ``hansa serve``, at a site between its node and ``hansa join``."""
