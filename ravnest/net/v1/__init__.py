"""Messages of the wire protocol, generated from proto/ravnest/v1. Knows protobuf alone."""
