"""TensorFlow's spellings of names that it calls experimental."""

from mpistrat.cross_device.options import CommunicationImplementation, CommunicationOptions

__all__ = ["CommunicationImplementation", "CommunicationOptions"]
