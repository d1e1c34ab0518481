"""What lies between the GPU kernels and the machine: devices, kernel sources, vendor libraries."""
