def custom_kernel(x):
    for _ in range(8):
        x = x.tanh()
    return x
