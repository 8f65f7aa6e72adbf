"""CPUs: the platform, and the operations that a C++ compiler makes faster."""
