"""What the pytest plug-in does once it is asked."""
