"""A second device on any machine, for tests of where tensors are; see `device.cpp`."""
