"""One module an endpoint: it turns a request body into engine requests and the results into a response."""
