"""Messages between the processes of one user: framed links over Unix sockets."""
