{{/* A pod template of the cluster. Takes root, group (a worker's name, or ""), spec (the group's values). */}}
{{- define "dspark.pod" -}}
{{- $root := .root -}}{{- $values := .root.Values -}}{{- $spec := .spec -}}{{- $worker := ne .group "" -}}
{{- $drain := include "dspark.drain" $root | int -}}
metadata:
  labels:
    {{- include "dspark.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ ternary "worker" "head" $worker }}
    {{- with $values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "dspark.serviceAccount" $root | quote }}
  automountServiceAccountToken: {{ and (not $worker) $values.autoscaling.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ ternary (add $drain 60) 60 $worker }}
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with get $spec "runtimeClassName" }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
  {{- with get $spec $key }}
  {{ $key }}: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- if and $worker (or $values.initContainers (include "dspark.fetched" $root)) }}
  initContainers:
    {{- range $values.modelVolumes }}{{ if get . "fetch" }}
    - name: fetch-{{ .name }}
      image: {{ .fetch.image | quote }}
      command: {{- toYaml .fetch.command | nindent 8 }}
      securityContext: {{- toYaml $values.containerSecurityContext | nindent 8 }}
      env: [{name: HOME, value: /tmp}]
      {{- with get .fetch "secret" }}
      envFrom: [{secretRef: {name: {{ . | quote }}}}]
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: model-{{ .name }}, mountPath: {{ .mountPath | quote }}}
    {{- end }}{{ end }}
    {{- with $values.initContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-worker" "ray-head" $worker }}
      image: {{ include "dspark.image" $root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      securityContext: {{- toYaml $values.containerSecurityContext | nindent 8 }}
      ports:
        - {name: serve, containerPort: {{ include "dspark.port" $root }}}
        - {name: metrics, containerPort: 8080}
        {{- if not $worker }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        {{- end }}
      env:
        {{- include "dspark.environment" $root | nindent 8 }}
        {{- with $values.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- $resources := deepCopy (get $spec "resources" | default dict) }}
      {{- if gt (get $spec "gpus" | default 0 | int) 0 }}
      {{- $_ := set $resources "limits" (merge (dict $values.gpuResource (get $spec "gpus" | int)) (get $resources "limits" | default dict)) }}
      {{- end }}
      {{- with $resources }}
      resources: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if $worker }}
      readinessProbe:
        httpGet: {path: {{ $values.probes.readinessPath }}, port: serve}
        periodSeconds: {{ $values.probes.periodSeconds }}
        timeoutSeconds: 5
        failureThreshold: {{ $values.probes.failureThreshold }}
      lifecycle:
        preStop: {exec: {command: [sleep, {{ $drain | quote }}]}}
      {{- end }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: cache, mountPath: /cache}
        {{- if $values.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: /etc/dspark/keys, readOnly: true}
        {{- end }}
        {{- if $worker }}{{ range $values.modelVolumes }}
        - name: model-{{ .name }}
          mountPath: {{ .mountPath | quote }}
          readOnly: true
          {{- with get . "subPath" }}
          subPath: {{ . | quote }}
          {{- end }}
        {{- end }}{{ end }}
        {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    - name: tmp
      emptyDir: {}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ $values.sharedMemory | quote }}}
    - name: cache
      {{- if and $worker $values.modelCache.enabled }}
      persistentVolumeClaim: {claimName: {{ $values.modelCache.existingClaim | default (printf "%s-cache" (include "dspark.fullname" $root)) | quote }}}
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- with $values.apiKeys }}{{ if .existingSecret }}
    - name: api-keys
      secret: {secretName: {{ .existingSecret | quote }}, defaultMode: 288, items: [{key: {{ .key | quote }}, path: {{ .key | quote }}}]}
    {{- end }}{{ end }}
    {{- if $worker }}{{ range $values.modelVolumes }}
    - name: model-{{ .name }}
      {{- if get . "image" }}
      image: {reference: {{ .image | quote }}, pullPolicy: IfNotPresent}
      {{- else if get . "fetch" }}
      emptyDir: {sizeLimit: {{ get .fetch "size" | default "100Gi" | quote }}}
      {{- else }}
      persistentVolumeClaim: {claimName: {{ required (printf "modelVolumes: %s needs a claim, an image or a fetch" .name) (get . "claim") | quote }}, readOnly: true}
      {{- end }}
    {{- end }}{{ end }}
    {{- with $values.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{/* Variables of Ray's containers, the same on all pods: Serve's proxies and replicas on different nodes have to agree. */}}
{{- define "dspark.environment" -}}
{{- $values := .Values -}}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /cache/huggingface}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
{{- /* As `dspark serve` sets them: Ray's own processes leave the processors to ours (services/cluster.py). */}}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_SERVE_CONTROL_LOOP_INTERVAL_S, value: "0.25"}
- {name: RAY_SERVE_METRICS_EXPORT_INTERVAL_MS, value: "2000"}
- {name: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH, value: "services.gateway.proxy_answers:middlewares"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: {{ $values.serveProxy.healthCheckPeriodSeconds | quote }}}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S, value: {{ $values.serveProxy.healthCheckTimeoutSeconds | quote }}}
- {name: RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S, value: {{ $values.serveProxy.readyCheckTimeoutSeconds | quote }}}
- {name: RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S, value: {{ include "dspark.proxyDraining" . | quote }}}
{{- if $values.serveProxy.haproxy }}
- {name: RAY_SERVE_THROUGHPUT_OPTIMIZED, value: "1"}
- {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
- {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: {{ max 120 (include "dspark.drain" . | int) | quote }}}
- {name: RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S, value: "5"}
{{- end }}
{{- with $values.hfToken }}{{ if .existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .key | quote }}}}
{{- end }}{{ end }}
{{- end -}}
