"""The sections of `parallel`, one file each, and what every section of the config is made of."""
