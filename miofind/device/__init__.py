"""Where it is computed: devices, their libraries and their memory."""
